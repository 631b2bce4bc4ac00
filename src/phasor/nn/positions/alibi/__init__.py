"""ALiBi: a linear bias on the scores."""
