"""The keys that blocks are sealed with: master keys, the keyring, and receipts of what was erased."""
