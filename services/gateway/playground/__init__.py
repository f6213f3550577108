"""The playground and the operator's page: static files for a browser, and the code that loads them."""
