"""T5's relative position bias on the scores."""
