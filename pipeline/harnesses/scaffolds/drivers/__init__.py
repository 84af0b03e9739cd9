"""Programs that start a scaffold of PyPI inside a workspace. They run there, by the scaffold's interpreter."""
