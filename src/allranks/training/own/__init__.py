"""The second door from inside: what `allranks.join` gives to a loop of one's own, call by call."""
