"""Notifications: changes of phases, sent to webhooks."""
