"""Model families: dialogues to tokens, sampled tokens to text and calls."""
