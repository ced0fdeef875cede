"""The SDK for threads; made of _async by generate.py."""
