"""Reference models for the demo, the tests and the measurements. Users bring their own."""
