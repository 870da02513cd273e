"""Each strategy beside the same one written by hand in torch."""
