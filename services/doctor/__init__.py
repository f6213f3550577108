"""`outrider doctor`: whether a target and a draft fit each other and this machine, before anything is served."""
