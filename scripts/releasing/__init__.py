"""What a release is checked for before it is made."""
