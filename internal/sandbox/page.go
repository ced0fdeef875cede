package sandbox

// Page is a part of a list.
type Page struct {
	// After is the last name of the previous page; empty is the first page.
	After string
	// Limit is the greatest number of objects in it; 0 is 100.
	Limit int
	// Bytes bounds how much of the journal is read for it: the page ends with the object
	// that reaches the bound. There may be more objects even if the page has fewer than
	// Limit. 0 is no bound.
	Bytes int
}

// Bounds of a page.
const (
	defaultPage = 100
	maxPage     = 1001 // one more than a client sees, to tell whether there is more
)

// Most returns the greatest number of objects in the page.
func (p Page) Most() int {
	if p.Limit <= 0 {
		return defaultPage
	}
	return min(p.Limit, maxPage)
}
