"""Makes the helpers beside this file (toys) importable from every test folder."""
