"""The audit log: who did what to the fleet, append-only, in a hash chain that shows later changes.

`entries` appends, `actors` says who acts, `chain` is the arithmetic of the chain, `sealing` extends and trims it,
`reading` lists, checks and exports. The steps of the ledger append in the step that changes the state (lua/common.lua).
"""
