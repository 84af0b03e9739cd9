"""Against a real container engine, by Harbor's environment `docker`: run by `make scaffolds-docker`."""
