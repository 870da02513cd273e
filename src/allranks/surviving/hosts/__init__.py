"""Several hosts: how their commands meet, what they tell each other, and who decides for all."""
