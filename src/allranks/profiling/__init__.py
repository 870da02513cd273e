"""Look at what is there: trace any module into a ModelProfile, measure the machine at hand."""
