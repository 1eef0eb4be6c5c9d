"""The storage node: landing, service, server."""
