"""What was seen and decided, as text for people, as JSON, and as the forms that others ask for."""
