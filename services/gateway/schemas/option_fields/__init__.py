"""Request fields of REST, as `scripts/option_sources.py` writes them from the table of options."""
