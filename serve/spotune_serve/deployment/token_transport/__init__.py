"""Tokens from replicas to gateways over TCP, beside Ray's calls."""
