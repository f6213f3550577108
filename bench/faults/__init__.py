"""Commands that break, flood and wear out running services, and check what clients notice."""
