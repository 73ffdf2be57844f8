"""HTTP routes of the gateway, and the application that has them all."""
