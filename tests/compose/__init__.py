"""docker-compose.yml on a real container engine, with the images of `make images`: run by `make compose-test`."""
