"""Network namespaces as hosts: what `deploy/` has a node run with, between machines, behind firewalls; and vLLM."""
