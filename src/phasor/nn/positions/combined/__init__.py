"""Several position schemes in one layer."""
