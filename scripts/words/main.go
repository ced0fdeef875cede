// Command words counts words in comments that stand for a noun and hide the
// actor, and prints how many of them each package has per 100 lines of comments.
// It shows where to rewrite. A sentence that it does not count can still be bad,
// and a sentence that it counts can be good: read it before you change it.
//
//	go run ./scripts/words [-max N] [-list] [FOLDER…]
//
// FOLDER limits the count to packages in and below these folders. With -list the
// program prints each finding with its file and line. With -max it fails if a
// package has more than N findings per 100 lines. A single finding never makes
// a package fail, because in a package with few comments it is a large share.
//
// # Patterns
//
// A comment is read as a list of words with punctuation. Quoted text and code
// blocks are left out, and so are directives and generated files. A clause starts
// at the start of a paragraph and after . : ; , ( and a dash. Each pattern looks
// at a word, the words around it, and whether it starts a clause:
//
//   - "what", as a subject or after a preposition: "What waits is closed", "of
//     what it wrote", "X is what the guest has", "this and what follows". After
//     other verbs only if "what" is the subject of its own clause: "keeps what
//     was written" is counted, "keeps what it needs" is not. Indirect questions
//     ("says what is wrong"), questions and "what kind" are not counted.
//   - "who", as a noun: at the start of a clause, unless a comma makes it a
//     relative pronoun, and after a preposition or a form of "be": "for who
//     copies", "is who asked". "The client, who waits" and "says who may read"
//     are not counted. So with "whom" and "whose": "by whom it is
//     held" is counted.
//   - "whoever" and "whomever", unless they start a sentence.
//   - "none", as a noun: "a request that is none", "has none", "0 is none", "for
//     none". Not counted are "none of them", "if there is none", "misses none"
//     and "none is lost".
//   - "nobody": another process, thread or user that the sentence could name.
//   - "nothing", as an actor or after a word that makes a riddle of it: "may
//     nothing", "is nothing", "for nothing", "nothing is". "Does nothing",
//     "there is nothing to do" and "nothing but" are not counted.
//   - "one", where it names a class at the end of a sentence: "*Log is one." Not
//     counted is "if there is one".
package main

import (
	"flag"
	"fmt"
	"io"
	"os"
	"slices"
	"strings"
	"text/tabwriter"
)

func main() {
	if err := run(os.Args[1:], os.Stdout); err != nil {
		fmt.Fprintln(os.Stderr, "words:", err)
		os.Exit(1)
	}
}

func run(args []string, out io.Writer) error {
	flags := flag.NewFlagSet("words", flag.ContinueOnError)
	limit := flags.Float64("max", -1, "fail if a package has more findings than this per 100 lines of comments")
	list := flags.Bool("list", false, "print each finding")
	if err := flags.Parse(args); err != nil {
		return err
	}
	folders := flags.Args()
	if len(folders) == 0 {
		folders = []string{"."}
	}
	packages, err := countFolders(folders)
	if err != nil {
		return err
	}
	if len(packages) == 0 {
		return fmt.Errorf("no Go files in %s", strings.Join(folders, ", "))
	}
	if *list {
		for _, p := range packages {
			for _, f := range p.findings {
				if _, err := fmt.Fprintf(out, "%s:%d: %s: %s\n", f.file, f.line, f.pattern, f.text); err != nil {
					return err
				}
			}
		}
	}
	if err := table(out, packages); err != nil {
		return err
	}
	if *limit >= 0 {
		return tooMany(packages, *limit)
	}
	return nil
}

// table prints the packages, the worst first, and a total.
func table(out io.Writer, packages []*pkg) error {
	slices.SortStableFunc(packages, func(a, b *pkg) int {
		switch {
		case a.rate() > b.rate():
			return -1
		case a.rate() < b.rate():
			return 1
		}
		return strings.Compare(a.folder, b.folder)
	})
	w := tabwriter.NewWriter(out, 0, 0, 2, ' ', tabwriter.AlignRight)
	total := &pkg{folder: "total"}
	if _, err := fmt.Fprint(w, "per 100\tfound\tlines\t  package\n"); err != nil {
		return err
	}
	row := func(p *pkg, found int) error {
		_, err := fmt.Fprintf(w, "%.1f\t%d\t%d\t  %s\n", p.rate(), found, p.lines, p.folder)
		return err
	}
	for _, p := range packages {
		total.lines += p.lines
		total.findings = append(total.findings, p.findings...)
		if err := row(p, len(p.findings)); err != nil {
			return err
		}
	}
	if err := row(total, len(total.findings)); err != nil {
		return err
	}
	return w.Flush()
}

// tooMany returns an error that names the packages above the limit.
func tooMany(packages []*pkg, limit float64) error {
	var names []string
	for _, p := range packages {
		if p.rate() > limit && len(p.findings) > 1 {
			names = append(names, p.folder)
		}
	}
	if len(names) == 0 {
		return nil
	}
	return fmt.Errorf("more than %g per 100 lines of comments in %s; -list shows the sentences", limit, strings.Join(names, ", "))
}
