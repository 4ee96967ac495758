"""What ranks call, compared between them: one description and one report for every backend.

| file | holds |
| --- | --- |
| `guard`, `settings` | the guard of a run: its parts, and how its errors reach the main thread; its options |
| `watch` | asks the other ranks when a collective does not complete (`guard="watch"`) |
| `verification/` | compares before each collective (`guard="verify"`) |
| `calls/` | what each rank has called, brought into one form and compared |
| `inquiry/` | why a collective does not complete: one rank asks all, and decides |
| `threads/` | what the threads of this process do |
| `ending/` | how a wait in the backend is ended |
"""
