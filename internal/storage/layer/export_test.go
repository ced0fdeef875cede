package layer

// Constants for the tests, which are in a package of their own.
const (
	ChunkSize     = chunkSize
	LockName      = lockName
	GatheredGap   = gatheredGap
	GatheredBytes = gatheredBytes
)
