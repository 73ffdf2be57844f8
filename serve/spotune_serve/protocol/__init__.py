"""Request and response bodies of the HTTP API, as OpenAI defines them."""
