"""The protocols that agents speak, one file each. Pure: bodies in, bodies and stream events out."""
