"""Network namespaces as hosts: the commands of `deploy/` between machines, behind firewalls; and vLLM."""
