"""What of a run's objects may be removed from the store, as a fold over its log. Pure: who removes is a service or a command."""
