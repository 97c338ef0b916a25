"""What a preflight is made of. See README.md in this folder."""
