"""The position divided by the length, on the input: naive, kept to show what fails."""
