"""Shared by the commands `kvstore` and `kvsim`: exit statuses, completion and progress."""
