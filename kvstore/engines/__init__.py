"""Serving engines as clients: each a package of its own, thin, and imported by nothing else of ours."""
