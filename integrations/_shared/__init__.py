"""What several integrations use: no names for users."""
