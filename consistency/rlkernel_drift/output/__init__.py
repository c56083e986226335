"""What a verdict is written as: text, Markdown, JSON (the model itself), JUnit."""
