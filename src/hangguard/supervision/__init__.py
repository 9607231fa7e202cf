"""The stories told over the layers below. Start with ``serve.py``."""
