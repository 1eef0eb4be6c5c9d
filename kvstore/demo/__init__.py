"""`kvstore demo`: the whole path on one machine, in four processes, with every byte compared."""
