"""The keys that encrypt blocks: master keys, the keyring, and receipts of erasures."""
