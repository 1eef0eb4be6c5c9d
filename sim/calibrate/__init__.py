"""What this machine does: measured, fitted to a profile, and held against what is predicted from it."""
