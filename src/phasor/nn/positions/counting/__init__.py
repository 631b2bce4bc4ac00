"""The bare position on the input: naive, kept to show what fails."""
