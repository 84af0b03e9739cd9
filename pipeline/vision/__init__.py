"""Images on metadata alone: their patches and tokens, who encodes them, and whose rows the encoder's output becomes."""
