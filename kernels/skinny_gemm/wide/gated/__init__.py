"""The gated product of about 65 to 512 rows."""
