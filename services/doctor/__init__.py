"""`outrider doctor`: checks, before serving, whether a target and a draft fit each other and this machine."""
