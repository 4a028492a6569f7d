"""Code that several integrations share; it has no names for users."""
