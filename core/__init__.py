"""What every part agrees on: settings, contracts, errors, tables, job states, leases, events. Imports nothing of ours."""
