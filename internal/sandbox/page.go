package sandbox

// Page is a part of a list.
type Page struct {
	// After is the last name of the page before; empty is the first page.
	After string
	// Limit is how many objects it has at most; 0 is 100.
	Limit int
	// Bytes is how much of the journal is read for it: the page ends with the object that
	// reaches it. There may be more, also where it has fewer than Limit. 0 is no bound.
	Bytes int
}

// Bounds of a page.
const (
	defaultPage = 100
	maxPage     = 1001 // one more than a client sees, to tell whether there is more
)

// Most is how many objects the page has at most.
func (p Page) Most() int {
	if p.Limit <= 0 {
		return defaultPage
	}
	return min(p.Limit, maxPage)
}
