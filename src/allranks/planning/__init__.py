"""Task and Cluster -> Plan: memory, time, rules and the search. No torch."""
