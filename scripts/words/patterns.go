package main

import (
	"strings"
	"unicode"
)

// word is a word of a comment in lower case, or one character of punctuation. A
// paragraph starts and ends with the word paragraph.
type word struct {
	text string
	line int
}

const paragraph = "¶"

// split splits lines into words. Code blocks and quoted text become the word
// "·".
func split(lines []textLine) []word {
	words := []word{{paragraph, 0}}
	var quote rune
	for _, l := range lines {
		trimmed := strings.TrimSpace(l.text)
		switch {
		case trimmed == "":
			words = append(words, word{paragraph, l.number})
			quote = 0
			continue
		case strings.HasPrefix(l.text, "\t"):
			words = append(words, word{"·", l.number})
			continue
		case strings.HasPrefix(trimmed, "- "):
			words = append(words, word{paragraph, l.number})
			trimmed = trimmed[2:]
		}
		var current []rune
		flush := func() {
			if len(current) > 0 {
				words = append(words, word{strings.ToLower(string(current)), l.number})
				current = nil
			}
		}
		for _, r := range trimmed {
			switch {
			case quote != 0:
				if r == quote {
					quote = 0
				}
			case r == '"' || r == '“' || r == '`':
				flush()
				words = append(words, word{"·", l.number})
				quote = r
				if r == '“' {
					quote = '”'
				}
			case unicode.IsLetter(r) || unicode.IsDigit(r) || r == '_' || r == '\'' || r == '’' || r == '-' && len(current) > 0:
				current = append(current, r)
			default:
				flush()
				if !unicode.IsSpace(r) {
					words = append(words, word{string(r), l.number})
				}
			}
		}
		flush()
	}
	return append(words, word{paragraph, 0})
}

func set(list string) map[string]bool {
	m := map[string]bool{}
	for _, w := range strings.Fields(list) {
		m[w] = true
	}
	return m
}

// The classes of words that the patterns distinguish.
var (
	sentenceStart = set(paragraph + " . ! ? :")
	clauseStart   = set(paragraph + " . ! ? : ; ( – — ,")
	prepositions  = set(`of for with by from in into on onto to at as than like beside besides beyond behind before after
		under over between about against around through without within until upon per via except despite`)
	// Verbs that introduce an indirect question: "says what is wrong", "knows of whom",
	// "depends on who".
	question = set(`say says said saying know knows known knew tell tells told show shows shown ask asks asked decide
		decides decided determine determines describe describes explain explains learn learns learned see sees find out
		check checks list lists listed matter matters choose chooses exactly understand report reports guess prove
		proves depends sure define defines print prints log logs specify wonder clear`)
	be          = set("is are was were be been being isn't aren't it's")
	have        = set("has have had")
	conjunction = set("and or but nor not only all even just both either also because that while when where if unless")
	auxiliary   = set(`is are was were be has had may might must can cannot could does did do should would will isn't
		hasn't comes came goes went remains follows stays runs waits lies ends needs belongs happens`)
	afterWhat = set("kind kinds order size sizes way sort happens happened if else about")
	number    = set("0 zero nil empty")
	riddle    = set("may can could must is are be of by for in to than nor which not from on")
)

// find returns the findings in one comment.
func find(words []word) []finding {
	var found []finding
	for i := 1; i+1 < len(words); i++ {
		c := cursor{words, i}
		if name := c.pattern(); name != "" {
			found = append(found, finding{line: words[i].line, pattern: name, text: c.around()})
		}
	}
	return found
}

// cursor is a place in a comment.
type cursor struct {
	words []word
	i     int
}

// at returns the word at an offset from here; outside of the comment it returns
// paragraph.
func (c cursor) at(offset int) string {
	i := c.i + offset
	if i < 0 || i >= len(c.words) {
		return paragraph
	}
	return c.words[i].text
}

func (c cursor) around() string {
	var b strings.Builder
	for i := -5; i <= 6; i++ {
		w := c.at(i)
		if w == paragraph {
			continue
		}
		if b.Len() > 0 && (unicode.IsLetter([]rune(w)[0]) || w == "·" || unicode.IsDigit([]rune(w)[0])) {
			b.WriteByte(' ')
		}
		b.WriteString(w)
	}
	return b.String()
}

// pattern returns the name of the pattern that matches here, or "".
func (c cursor) pattern() string {
	matches := false
	switch c.at(0) {
	case "what", "whatever":
		matches = c.what()
	case "who", "whom", "whose":
		matches = c.who()
	case "whoever", "whomever":
		matches = !sentenceStart[c.at(-1)]
	case "none":
		matches = c.none()
	case "nobody":
		matches = true
	case "nothing":
		matches = c.nothing()
	case "one":
		matches = be[c.at(-1)] && sentenceEnd(c.at(1)) && c.at(-2) != "there"
	}
	if !matches {
		return ""
	}
	return c.at(0)
}

func sentenceEnd(w string) bool { return w == paragraph || w == "." || w == ";" || w == ":" }

// isQuestion reports whether the sentence ends in a question mark.
func (c cursor) isQuestion() bool {
	for j := 1; ; j++ {
		switch c.at(j) {
		case "?":
			return true
		case ".", paragraph:
			return false
		}
	}
}

// asked reports whether a verb before here makes an indirect question of the clause.
func (c cursor) asked() bool {
	return question[c.at(-1)] || prepositions[c.at(-1)] && question[c.at(-2)]
}

func (c cursor) what() bool {
	before, after := c.at(-1), c.at(1)
	switch {
	case c.asked() || c.isQuestion() || afterWhat[after]:
		return false
	case c.at(0) == "whatever": // "whatever it answers" is an adverb
		return prepositions[before] || be[before] || auxiliary[after] && !clauseStart[before]
	}
	return clauseStart[before] || prepositions[before] || be[before] || conjunction[before] || auxiliary[after]
}

func (c cursor) who() bool {
	before := c.at(-1)
	switch {
	case c.asked() || c.isQuestion():
		return false
	case c.at(0) == "whose":
		return sentenceStart[before]
	}
	return clauseStart[before] && before != "," || prepositions[before] || be[before] || conjunction[before]
}

func (c cursor) none() bool {
	before, after := c.at(-1), c.at(1)
	switch {
	case after == "of":
		return false
	case be[before] && c.at(-2) == "there" && (c.at(-3) == "if" || c.at(-3) == "when"):
		return false
	case be[before] || have[before] || prepositions[before] || number[before]:
		return true
	}
	return clauseStart[before] && !auxiliary[after]
}

func (c cursor) nothing() bool {
	before, after := c.at(-1), c.at(1)
	switch {
	case after == "but" || after == "else" || after == "to":
		return false
	case be[before] && c.at(-2) == "there":
		return false
	}
	return riddle[before] || after == "is" || after == "was" || after == "has" || after == "may" || after == "can"
}
