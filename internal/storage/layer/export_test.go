package layer

// What the tests, which are a package of their own, know of this one.
const (
	ChunkSize     = chunkSize
	LockName      = lockName
	GatheredGap   = gatheredGap
	GatheredBytes = gatheredBytes
)
