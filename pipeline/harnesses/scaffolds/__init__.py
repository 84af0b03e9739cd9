"""Agent scaffolds: what capture is told of each one's requests, a file a scaffold. Observed at the versions that they name."""
