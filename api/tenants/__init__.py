"""The operator's side: tenants, projects and keys."""
